"""What the HTML page shows, worked out before any markup is written."""
