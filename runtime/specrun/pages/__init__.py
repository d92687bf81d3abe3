"""Pages for people: one HTML file each that needs nothing else and opens from the disk."""
