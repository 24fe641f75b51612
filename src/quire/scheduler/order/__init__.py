"""In which order waiting requests are admitted, and the other way round preempted: one file per schedule."""
