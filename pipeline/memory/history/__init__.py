"""What tasks and steps were measured to need, kept from run to run, and what that says of the next."""
