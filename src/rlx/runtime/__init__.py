"""What runs compiled programs: memory, thread pool, native driver, object cache, trust in native code."""
