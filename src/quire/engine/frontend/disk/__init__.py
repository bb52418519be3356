"""The journal on disk: what outlives the API process.

`records.py` is the format of a file, `cipher.py` its encryption, `folder.py` who may use which
file, `reading.py` what a file holds, `writer.py` the thread that writes, and `disk_journal.py` what
the rest of the front end sees.
"""
