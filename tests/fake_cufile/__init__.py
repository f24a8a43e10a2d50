"""A made-up libcufile.so.0, for the made-up driver of fake_cuda."""
