"""Looking after a cache: damage found and repaired, what nobody needs swept, shards compacted, moved and staged."""
