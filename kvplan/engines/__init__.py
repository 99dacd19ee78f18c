"""What plugs into serving engines: nothing here imports one before it is asked for."""
