"""Configuration of a folder: text models inside of multimodal ones, and overrides."""
