package main

import (
	"errors"

	"github.com/spf13/cobra"
)

// newUpCmd runs a pool on this machine.
func newUpCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "up -f pool.yaml",
		Short: "Run a pool on this machine",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			return errors.New("up is not available yet")
		},
	}
}
