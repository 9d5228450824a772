"""The verbs people type: parse, call one function below, print."""
