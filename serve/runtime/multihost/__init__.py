"""One model over the devices of several processes: rendezvous, messages, supervision."""
