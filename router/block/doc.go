// Package block turns prompt bytes or token ids into chained block hashes.
package block
