"""Know devices: their data sheets, their limits, their installed packages."""
