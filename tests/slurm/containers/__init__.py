"""Workers in containers: a stand-in for Apptainer, an image of nothing but folders, and the tests."""
