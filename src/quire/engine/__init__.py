"""The loop: schedule, launch, collect, commit."""
