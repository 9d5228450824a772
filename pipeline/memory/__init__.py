"""What training takes: predicted before it is submitted, verified and survived while it runs, remembered afterwards."""
