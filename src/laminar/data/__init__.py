"""Prompt pool, partial response pool, experience buffer, and the journal that makes them durable."""
