// Package stats summarises measurements: percentiles, paired bootstrap
// intervals, strata, imbalance.
//
// It decides nothing about what is measured and draws no random numbers of its
// own: the source is an argument, so a report can be made again from its seed.
// Functions of an empty sample return NaN; Summarize leaves every field 0 with
// N = 0, so that a summary always encodes as JSON.
package stats
