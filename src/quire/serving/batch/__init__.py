"""Batch files in OpenAI's format: a request per line, run through the server's own application.

`lines` is the format, `files` where lines come from and go to, `unfinished` what is kept of a run
that was interrupted, `run` the run itself. The command is `quire run-batch`.
"""
