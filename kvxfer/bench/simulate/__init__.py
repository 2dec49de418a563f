"""A discrete-event model of a cluster, on costs that were measured: `kvxfer bench simulate`."""
