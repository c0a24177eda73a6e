"""Native code of the runtime itself: pool, driver, reader, guard of mapped files."""
