"""The marketplace: gateway, fleet, matching, jobs, metering, billing and finance."""
