"""Options of engine, server and router: meaning, default and limits of each."""
