"""Where a data set comes from: what people bring becomes a stream of items and rejections, before any file is read."""
