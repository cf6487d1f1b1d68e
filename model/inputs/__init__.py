"""What layers are told of a token beside the stream that goes through them."""
