"""The machine under the engine: devices, memory, files, sockets, signals."""
