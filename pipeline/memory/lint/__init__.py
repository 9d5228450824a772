"""Checks for settings that do harm, or nothing, where people hope to save memory."""
