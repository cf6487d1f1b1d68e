"""The machine under the engine: devices, memory, files, streams and signals."""
