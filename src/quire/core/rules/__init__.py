"""The scheduler's rules. Each reads and changes the books, and nothing here knows the scheduler.

- `continue_running`: running requests get their next tokens.
- `admit`: waiting requests come in, in the order of the policy.
- `preempt`: a running request loses its place, for whatever reason.
- `update`: what the results of a step mean.
- `undo`: a change that was left by an exception is taken back.
- `collect`: facts about the step that was just applied.
"""
