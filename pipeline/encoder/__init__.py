"""From sequences to embeddings: by ESM-2 and its relatives, or by a class of the user's."""
