package sim

import (
	"encoding/csv"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func preset(t testing.TB, name string) Preset {
	t.Helper()
	p, ok := PresetOf(name)
	if !ok {
		t.Fatalf("no preset %q", name)
	}
	return p
}

func within(t *testing.T, what string, got, lo, hi time.Duration) {
	t.Helper()
	if got < lo || got > hi {
		t.Errorf("%s = %v, want %v … %v", what, got.Round(time.Millisecond), lo, hi)
	}
}

// The paper's reseed (its §9.3): 50–90 K tokens cost 1.5–3 s of prefill and
// 1.5–4 s of transfer over TCP, about 200 ms over RDMA.
func TestThePapersReseed(t *testing.T) {
	c := preset(t, "h100").Cost
	for _, tokens := range []int{50_000, 67_000, 90_000} {
		within(t, "prefill", c.Prefill(tokens, 0), 1500*time.Millisecond, 3*time.Second)
		within(t, "transfer over TCP", c.Transfer(tokens, LinkOf("mooncake_tcp")), 1500*time.Millisecond, 4*time.Second)
		within(t, "transfer over RDMA", c.Transfer(tokens, LinkOf("mooncake")), 130*time.Millisecond, 270*time.Millisecond)
	}
	// 67 K tokens is what one eviction frees in the paper's runs.
	within(t, "transfer of 67 K over RDMA", c.Transfer(67_000, LinkOf("nixl")), 180*time.Millisecond, 220*time.Millisecond)
}

func TestADirectAppendIsCheap(t *testing.T) {
	c := preset(t, "h100").Cost
	// The median append of real agent turns behind 90 K resident tokens.
	within(t, "713 tokens behind 90 K", c.Prefill(713, 90_000), 30*time.Millisecond, 80*time.Millisecond)
}

func TestCapacities(t *testing.T) {
	if got := preset(t, "h100").CapacityTokens; got != 92_104 {
		t.Errorf("K_d of the H100 = %d, want the paper's 92,104", got)
	}
	if h, l := preset(t, "h200").CapacityTokens, preset(t, "h100").CapacityTokens; h < 3*l {
		t.Errorf("141 GB hold %d tokens, 80 GB %d: the weights are paid once", h, l)
	}
}

// Cutting a prompt into chunks costs one PrefillBase per chunk and nothing
// else; more tokens, more context and more sequences never cost less.
func TestCostLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, _ := PresetOf(rapid.SampledFrom(PresetNames()).Draw(t, "preset"))
		c := p.Cost
		n := rapid.IntRange(2, 200_000).Draw(t, "n")
		ctx := rapid.IntRange(0, 200_000).Draw(t, "ctx")
		cut := rapid.IntRange(1, n-1).Draw(t, "cut")

		whole := c.Prefill(n, ctx)
		parts := c.Prefill(cut, ctx) + c.Prefill(n-cut, ctx+cut)
		if d := parts - whole - c.PrefillBase; d.Abs() > time.Microsecond {
			t.Fatalf("cut at %d: %v in parts, %v whole", cut, parts, whole)
		}
		if c.Prefill(n, ctx) < c.Prefill(n-1, ctx) || c.Prefill(n, ctx+1) < c.Prefill(n, ctx) {
			t.Fatal("more work takes less time")
		}
		if c.DecodeStep(cut+1) < c.DecodeStep(cut) {
			t.Fatal("a larger batch takes less time")
		}
		link := LinkOf("mooncake")
		if c.Transfer(n, link) < c.Transfer(cut, link) {
			t.Fatal("more KV moves in less time")
		}
	})
}

func TestNothingTakesNoTime(t *testing.T) {
	c := preset(t, "h100").Cost
	if c.Prefill(0, 1000) != 0 || c.PrefillWork(0, 1000) != 0 || c.DecodeStep(0) != 0 {
		t.Error("work of no tokens takes time")
	}
	if got, want := c.Transfer(0, LinkOf("mooncake")), LinkOf("mooncake").Latency; got != want {
		t.Errorf("a transfer of nothing takes %v, want the latency %v", got, want)
	}
	if got := c.Transfer(1_000_000, LinkOf("fake")); got != 0 {
		t.Errorf("a fake transfer takes %v", got)
	}
}

func TestPresetsAreComplete(t *testing.T) {
	for _, name := range PresetNames() {
		p := preset(t, name)
		if p.Source == "" || p.Accelerator == "" || p.CapacityTokens < 10_000 || p.Cost.KVBytesPerToken == 0 ||
			p.Cost.PrefillBase == 0 || p.Cost.DecodeBase == 0 || p.Cost.DecodePerSeq == 0 {
			t.Errorf("preset %s lacks something: %+v", name, p)
		}
	}
	if _, ok := PresetOf("abacus"); ok {
		t.Error("an unknown preset was found")
	}
}

// measurement is one row of the Splitwise performance model.
type measurement struct {
	prompt, batch     int
	prefill, decodeMS float64
}

// splitwise reads the rows of one model, machine and tensor parallelism.
func splitwise(t *testing.T, hardware string) []measurement {
	t.Helper()
	dir := os.Getenv("KVC_TRACES")
	if dir == "" {
		dir = filepath.Join("..", "..", "..", "shared", "traces")
	}
	f, err := os.Open(filepath.Join(dir, "splitwise", "splitwise_perf_model.csv"))
	if err != nil {
		t.Skipf("the Splitwise measurements are not here (set KVC_TRACES): %v", err)
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	col := map[string]int{}
	for i, name := range rows[0] {
		col[name] = i
	}
	number := func(row []string, name string) float64 {
		v, err := strconv.ParseFloat(row[col[name]], 64)
		if err != nil {
			t.Fatalf("column %s: %v", name, err)
		}
		return v
	}
	var out []measurement
	for _, row := range rows[1:] {
		if row[col["model"]] == "llama2-70b" && row[col["hardware"]] == hardware && row[col["tensor_parallel"]] == "4" {
			out = append(out, measurement{
				int(number(row, "prompt_size")), int(number(row, "batch_size")),
				number(row, "prompt_time"), number(row, "token_time"),
			})
		}
	}
	if len(out) == 0 {
		t.Fatalf("no rows for %s", hardware)
	}
	return out
}

func quantile(v []float64, q float64) float64 {
	slices.Sort(v)
	return v[int(q*float64(len(v)-1))]
}

// prefillOf is a pass over batch prompts, in ms.
func prefillOf(c Cost, m measurement) float64 {
	work := time.Duration(m.batch) * c.PrefillWork(m.prompt, 0)
	return float64(c.PrefillBase+work) / 1e6
}

func TestSplitwiseFit(t *testing.T) {
	for name, hardware := range map[string]string{
		"llama2-70b-h100x4": "h100-80gb", "llama2-70b-a100x4": "a100-80gb",
	} {
		t.Run(name, func(t *testing.T) {
			c := preset(t, name).Cost
			var prefill, decode []float64
			for _, m := range splitwise(t, hardware) {
				prefill = append(prefill, math.Abs(prefillOf(c, m)/m.prefill-1))
				decode = append(decode, math.Abs(float64(c.DecodeStep(m.batch))/1e6/m.decodeMS-1))
			}
			t.Logf("relative error: prefill p50 %.3f p90 %.3f, decode p50 %.3f p90 %.3f",
				quantile(prefill, .5), quantile(prefill, .9), quantile(decode, .5), quantile(decode, .9))
			if quantile(prefill, .5) > 0.12 || quantile(prefill, .9) > 0.32 {
				t.Errorf("prefill errs by p50 %.2f p90 %.2f, want ≤ 0.12 and 0.32", quantile(prefill, .5), quantile(prefill, .9))
			}
			if quantile(decode, .5) > 0.05 || quantile(decode, .9) > 0.08 {
				t.Errorf("decode errs by p50 %.2f p90 %.2f, want ≤ 0.05 and 0.08", quantile(decode, .5), quantile(decode, .9))
			}
		})
	}
}

// The a100 preset is the h100 one by the measured ratio of the two machines.
func TestA100FollowsTheMeasuredRatio(t *testing.T) {
	h, a := splitwise(t, "h100-80gb"), splitwise(t, "a100-80gb")
	at := func(rows []measurement, f func(measurement) float64) float64 {
		var v []float64
		for _, m := range rows {
			if m.prompt >= 2048 && m.batch == 1 {
				v = append(v, f(m)/float64(m.prompt))
			}
		}
		return quantile(v, .5)
	}
	byPrefill := func(m measurement) float64 { return m.prefill }
	byDecode := func(m measurement) float64 { return m.decodeMS }
	measuredPrefill, measuredDecode := at(a, byPrefill)/at(h, byPrefill), at(a, byDecode)/at(h, byDecode)

	hc, ac := preset(t, "h100").Cost, preset(t, "a100").Cost
	prefill := float64(ac.Prefill(8192, 0)) / float64(hc.Prefill(8192, 0))
	decode := float64(ac.DecodeStep(1)) / float64(hc.DecodeStep(1))
	if math.Abs(prefill/measuredPrefill-1) > 0.15 || math.Abs(decode/measuredDecode-1) > 0.15 {
		t.Errorf("A100/H100: prefill %.2f decode %.2f, measured %.2f and %.2f", prefill, decode, measuredPrefill, measuredDecode)
	}
}
