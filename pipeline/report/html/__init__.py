"""What is known of a run → one page of HTML: pure functions of plain documents, no network, no library."""
