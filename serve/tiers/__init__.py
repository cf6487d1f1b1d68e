"""Where pages are kept beside the device's pools."""
