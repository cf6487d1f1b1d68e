"""What is measured: a function a part, which yields rows."""
