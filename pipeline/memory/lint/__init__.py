"""Settings that are known to do harm, or nothing, where people hope to save memory."""
