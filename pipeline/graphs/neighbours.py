"""Who is near whom: nearest neighbours and neighbours within a distance, by cKDTree."""
