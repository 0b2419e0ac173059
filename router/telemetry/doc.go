// Package telemetry holds every metric name of the router in one file, and the
// log set-up of the router's programs.
//
// It decides names, labels and buckets. Labels are closed sets or bounded by
// the fleet: nothing a client can choose becomes a label (R114). It refuses to
// know when a metric moves.
package telemetry
