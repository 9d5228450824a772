"""What moves a run on: submit, supervise, dispatch, repair, hand over, cancel, and the task inside a job."""
