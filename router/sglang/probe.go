package sglang

import (
	"context"
	"fmt"
	"net/http"

	"github.com/kvc-dev/kvc/router/block"
)

// Path is the engine's HTTP path of a surface.
func Path(r block.Route) string {
	switch r {
	case block.Chat:
		return "/v1/chat/completions"
	case block.Completions:
		return "/v1/completions"
	}
	return "/generate"
}

// RouteOf is the surface of an HTTP path; ok is false for any other path.
func RouteOf(path string) (r block.Route, ok bool) {
	for _, r := range [...]block.Route{block.Chat, block.Completions, block.Generate} {
		if Path(r) == path {
			return r, true
		}
	}
	return "", false
}

// ProbeLocalPrefill asks a decode engine whether it prefills by itself on this
// surface (conditional aggregation, sglang-contract §2.6): one token with
// do_local_prefill and without a bootstrap room. A stock engine, and one whose
// OpenAI surfaces drop the field, answers 400. It must never be sent to a null
// engine, which would answer 200 and prove nothing.
func (c *Client) ProbeLocalPrefill(ctx context.Context, r block.Route, model string) (bool, error) {
	var body map[string]any
	switch r {
	case block.Chat:
		body = map[string]any{"model": model, "max_tokens": 1,
			"messages": []map[string]string{{"role": "user", "content": "."}}}
	case block.Completions:
		body = map[string]any{"model": model, "max_tokens": 1, "prompt": "."}
	default:
		body = map[string]any{"input_ids": []int{1}, "sampling_params": map[string]any{"max_new_tokens": 1}}
	}
	body["do_local_prefill"] = true
	err := c.call(ctx, http.MethodPost, Path(r), body, nil)
	if Refused(err, http.StatusBadRequest) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("probe %s: %w", r, err)
	}
	return true, nil
}

// ProbeNativeAdmission asks whether the engine has its own
// /admit_direct_append: anything but "no such route" means it has.
func (c *Client) ProbeNativeAdmission(ctx context.Context) (bool, error) {
	_, err := c.AdmitDirectAppend(ctx, map[string]any{})
	switch {
	case err == nil, Refused(err, http.StatusBadRequest), Refused(err, http.StatusUnprocessableEntity):
		return true, nil
	case Refused(err, http.StatusNotFound), Refused(err, http.StatusMethodNotAllowed):
		return false, nil
	}
	return false, fmt.Errorf("probe native admission: %w", err)
}
