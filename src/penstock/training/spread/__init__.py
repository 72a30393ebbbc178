"""One trial on several workers, or in several parts."""
