"""Running the trials of a scan: processes, their conditions, and the loop until the time is spent.

What a trial has shown goes into a history (`loragate.history`); what that means, and what comes
next, is decided by `loragate.nightly`, which is pure.
"""
