"""What is wrong and why, as plain functions over streams of records. Standard library and protocol alone."""
