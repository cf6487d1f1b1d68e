"""One model over the devices of several processes: meeting, messages, supervision."""
