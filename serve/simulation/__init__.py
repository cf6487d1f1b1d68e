"""The real engine on a device that is a model of time: what a workload would see, before anything is run."""
