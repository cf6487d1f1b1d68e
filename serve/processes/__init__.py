"""One model over the devices of several processes: how they meet, what they tell each other, how all end."""
