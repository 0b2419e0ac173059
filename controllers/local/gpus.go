package local

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

// nvidiaGPUs lists the indexes of the GPUs that this process may use. A machine
// without nvidia-smi has none; one where it fails is broken, which is an error.
func nvidiaGPUs(ctx context.Context) ([]string, error) {
	const wait = 20 * time.Second // a cold driver takes seconds
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	out, err := exec.CommandContext(ctx, "nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader").Output()
	if errors.Is(err, exec.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list GPUs with nvidia-smi: %w", err)
	}
	visible, limited := os.LookupEnv("CUDA_VISIBLE_DEVICES")
	return parseGPUs(out, visible, limited), nil
}

// parseGPUs reads nvidia-smi's table and keeps what CUDA_VISIBLE_DEVICES allows.
func parseGPUs(table []byte, visible string, limited bool) []string {
	allowed := strings.Split(visible, ",")
	var gpus []string
	for line := range bytes.Lines(table) {
		index, uuid, ok := strings.Cut(strings.TrimSpace(string(line)), ",")
		index, uuid = strings.TrimSpace(index), strings.TrimSpace(uuid)
		if !ok || index == "" {
			continue
		}
		if !limited || slices.Contains(allowed, index) || slices.Contains(allowed, uuid) {
			gpus = append(gpus, index)
		}
	}
	return gpus
}

// gpuPlan says which program the engines are and which GPUs each of them gets.
type gpuPlan struct {
	pool   *v1alpha1.KVCPool // the pool to run, which may differ from the manifest in engine.type
	gpus   map[v1alpha1.Role][][]string
	notice string // what a person should know; "" = nothing
}

// planGPUs keeps SGLang where the machine has the GPUs for it and runs the
// emulator on a machine that has none. Too few GPUs is an error, for a pool on
// the emulator would not be the pool that was asked for.
func planGPUs(
	ctx context.Context, pool *v1alpha1.KVCPool, list func(context.Context) ([]string, error),
) (gpuPlan, error) {
	if pool.Spec.Engine.Type == v1alpha1.EngineEmulator {
		return gpuPlan{pool: pool}, nil
	}
	have, err := list(ctx)
	if err != nil {
		return gpuPlan{}, err
	}
	if len(have) == 0 {
		emulated := pool.DeepCopy()
		emulated.Spec.Engine.Type = v1alpha1.EngineEmulator
		emulated.Spec.Engine.Image = ""
		return gpuPlan{pool: emulated, notice: "this machine has no GPU (nvidia-smi lists none): " +
			"running the emulator instead of SGLang; answers are made up, times are modelled"}, nil
	}
	need := 0
	plan := gpuPlan{pool: pool, gpus: map[v1alpha1.Role][][]string{}}
	for _, role := range v1alpha1.Roles() {
		r := pool.Spec.Role(role)
		for range *r.Replicas {
			size := int(*r.TensorParallelSize)
			if need+size <= len(have) {
				plan.gpus[role] = append(plan.gpus[role], have[need:need+size])
			}
			need += size
		}
	}
	if need > len(have) {
		return gpuPlan{}, fmt.Errorf("the pool needs %d GPUs (replicas × tensorParallelSize of both roles) and this "+
			"machine offers %d; lower spec.prefill.replicas, spec.decode.replicas or tensorParallelSize, "+
			"or set spec.engine.type: Emulator", need, len(have))
	}
	return plan, nil
}

// checkSGLang says in one sentence that SGLang is not installed.
func checkSGLang(ctx context.Context) error {
	const probe = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('sglang') else 3)"
	err := exec.CommandContext(ctx, "python3", "-c", probe).Run()
	if err != nil {
		return fmt.Errorf("python3 cannot find the module sglang (%w); install it (pip install sglang) "+
			"in the Python that runs as python3, or set spec.engine.type: Emulator", err)
	}
	return nil
}
