"""Answers for people: estimates, why, explain, efficiency, comparisons, the HTML report."""
