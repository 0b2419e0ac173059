package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

// newRootCmd assembles the tool. Each command lives in a file of its own with
// one constructor; subcommands is the only list of them.
func newRootCmd() *cobra.Command {
	root := &cobra.Command{
		Use:   "kvc",
		Short: "Serve multi-turn agent sessions where their KV cache already is",
		Long: "kvc runs a pool of prefill and decode workers on this machine, sends it a workload,\n" +
			"and explains where each turn went and why.",
		Args:          noArgs,
		SilenceUsage:  true, // an error is one sentence, not a page of flags
		SilenceErrors: true, // main prints it, once
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w (see %q)", err, cmd.CommandPath()+" --help")}
	})
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(subcommands()...)
	return root
}

// subcommands lists every command of the tool, in the order of help.
func subcommands() []*cobra.Command {
	return []*cobra.Command{
		newUpCmd(),
		newBenchCmd(),
		newDemoCmd(),
		newExplainCmd(),
	}
}

// noArgs refuses positional arguments with a sentence that names the first one.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return usageError{fmt.Errorf("unknown command or argument %q for %q (see %q)",
		args[0], cmd.CommandPath(), cmd.CommandPath()+" --help")}
}
