"""Where jobs run: the executors behind one protocol."""
