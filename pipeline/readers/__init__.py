"""Files of items that are no structures, read as entries: what `data.reader` names."""
