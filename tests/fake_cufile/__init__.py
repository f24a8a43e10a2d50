"""A fake libcufile.so.0, for the fake driver of fake_cuda."""
