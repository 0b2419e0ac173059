#!/usr/bin/env bash
# Asks a real SGLang engine about everything that docs/sglang-contract.md marks
# [inferred] or [unsure], and about what the emulator had to assume beyond it.
# Run it where there is a GPU; a probe that differs is news for the contract.
#
#   hack/real-sglang.sh --list
#   hack/real-sglang.sh --unified http://host:30000
#   hack/real-sglang.sh --prefill http://p:30000 --decode http://d:30000 --bootstrap p:8998
#
# Options: --key KEY (engine's --api-key), --model NAME, --timeout SECONDS (default 60),
# --destructive (also probes that are expected to kill an engine), --verbose
# (show every answer), and names of probes to run only those.
set -euo pipefail

unified='' prefill='' decode='' bootstrap='' key='' model='' timeout=60 destructive='' verbose='' list=''
only=()

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; }

while [ $# -gt 0 ]; do
	case $1 in
	--unified) unified=${2%/}; shift ;;
	--prefill) prefill=${2%/}; shift ;;
	--decode) decode=${2%/}; shift ;;
	--bootstrap) bootstrap=$2; shift ;;
	--key) key=$2; shift ;;
	--model) model=$2; shift ;;
	--timeout) timeout=$2; shift ;;
	--destructive) destructive=1 ;;
	--verbose) verbose=1 ;;
	--list) list=1 ;;
	-h | --help) usage; exit ;;
	-*) echo "real-sglang: $1 is not an option; see --help" >&2; exit 2 ;;
	*) only+=("$1") ;;
	esac
	shift
done

# ---- the table ---------------------------------------------------------------

names=()
declare -A needs section want why

# probe NAME NEEDS SECTION WANT WHY: what is asked is in the function p_NAME; WANT
# is an extended regular expression for "<status> <body on one line>".
probe() {
	names+=("$1")
	needs[$1]=$2 section[$1]=$3 want[$1]=$4 why[$1]=$5
}

# Every request goes through here: METHOD URL [BODY [HEADER…]].
call() {
	local method=$1 url=$2 body=${3-}
	local args=(-sS -m "$timeout" -X "$method" -w $'\n%{http_code}')
	[ -z "$key" ] || args+=(-H "Authorization: Bearer $key")
	[ -z "$body" ] || args+=(-H 'Content-Type: application/json' --data-binary "$body")
	shift $(($# < 3 ? $# : 3))
	for h in "$@"; do args+=(-H "$h"); done
	local out
	out=$(curl "${args[@]}" "$url" 2>&1) || { echo "000 $out" | tr '\n' ' '; return; }
	printf '%s %s' "${out##*$'\n'}" "${out%$'\n'*}" | tr -d '\r' | tr '\n' ' '
}

room() { echo $((RANDOM << 45 | RANDOM << 30 | RANDOM << 15 | RANDOM | 1)); }

# meet ROOM: the bootstrap members of a request.
meet() { printf '"bootstrap_host":"%s","bootstrap_port":%s,"bootstrap_room":%s' "${bootstrap%:*}" "${bootstrap##*:}" "$1"; }

# pair PATH BODY: the same body to both; prints the prefill answer, " || ", the decode one.
pair() {
	local p
	p=$(mktemp)
	call POST "$prefill$1" "$2" >"$p" &
	local d
	d=$(call POST "$decode$1" "$2")
	wait $!
	printf '%s || %s' "$(cat "$p")" "$d"
	rm -f "$p"
}

m() { printf '"model":"%s"' "$model"; }
one='"sampling_params":{"max_new_tokens":1,"temperature":0}'
hello='"messages":[{"role":"user","content":"Say hello."}]'

probe unified-ignores-bootstrap unified '§2.2 [inferred]' '^200 .*"meta_info"' \
	'a unified engine carries bootstrap members but ignores them'
p_unified_ignores_bootstrap() {
	call POST "$unified/generate" "{\"text\":\"Hi\",$one,\"bootstrap_host\":\"10.0.0.1\",\"bootstrap_port\":8998,\"bootstrap_room\":5}"
}

probe unified-ignores-local unified '§2.6 [inferred]' '^200 .*"meta_info"' \
	'do_local_prefill is ignored by a unified engine, as unknown keys are'
p_unified_ignores_local() { call POST "$unified/generate" "{\"text\":\"Hi\",$one,\"do_local_prefill\":true}"; }

probe local-generate decode '§2.6' '^(200 .*"meta_info"|400 .*without bootstrap room)' \
	'the capability probe: 200 = Direct on /generate, 400 = stock; anything else is news'
p_local_generate() { call POST "$decode/generate" "{\"input_ids\":[1],$one,\"do_local_prefill\":true}"; }

probe local-chat decode '§2.6 [unsure]' '^(200 .*"chat.completion"|400 .*without bootstrap room)' \
	'whether the OpenAI routes carry do_local_prefill: 200 = yes, 400 = dropped'
p_local_chat() { call POST "$decode/v1/chat/completions" "{$(m),$hello,\"max_tokens\":1,\"do_local_prefill\":true}"; }

probe local-reuses-radix decode '§2.6 [inferred]' '(^400 .*bootstrap room|"cached_tokens":[1-9])' \
	'a local prefill reuses what is resident (needs --disaggregation-decode-enable-radix-cache)'
p_local_reuses_radix() {
	local ids
	ids=$(seq -s, 1000 1300)
	call POST "$decode/generate" "{\"input_ids\":[$ids],$one,\"do_local_prefill\":true}" >/dev/null
	call POST "$decode/generate" "{\"input_ids\":[$ids],$one,\"do_local_prefill\":true}"
}

probe no-room decode '§2.2' "^400 .*Disaggregated request received without bootstrap room id\. req\.rid='probe-1'" \
	'the exact message of a PD worker without a room'
p_no_room() { call POST "$decode/generate" "{\"rid\":\"probe-1\",\"text\":\"Hi\",$one}"; }

probe no-room-stream decode '§2.5 [inferred]' '^200 .*"finish_reason":\{"type":"abort".*"status_code":400.*\[DONE\]' \
	'streamed /generate: an abort of the scheduler is a chunk, also with status 400'
p_no_room_stream() { call POST "$decode/generate" "{\"text\":\"Hi\",\"stream\":true,$one}"; }

probe no-room-chat-stream decode '§2.5 [inferred]' '^200 .*"error":\{"object":"error".*"type":"BAD_REQUEST".*"code":400.*\[DONE\]' \
	'streamed chat: the same as an error event, typed by the name of the status'
p_no_room_chat_stream() { call POST "$decode/v1/chat/completions" "{$(m),$hello,\"stream\":true}"; }

probe route-dtype prefill '§2.7 [unsure]' '^200 .*"kv_cache_dtype":' \
	'how kv_cache_dtype is spelled (torch.bfloat16, auto, …): read it in --verbose'
p_route_dtype() {
	call GET "http://$bootstrap/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
}

probe route-missing-inputs prefill '§2.7' '^400 Missing inputs for bootstrap server' 'the bootstrap server checks its query'
p_route_missing_inputs() { call GET "http://$bootstrap/route"; }

probe pair-generate pair '§2.4' '^200 .*"type":"length","length":0.* \|\| 200 .*"completion_tokens":4' \
	'P: one token, length 0; D: the whole answer'
p_pair_generate() {
	pair /generate "{\"text\":\"Tell me about the sea.\",\"sampling_params\":{\"max_new_tokens\":4,\"ignore_eos\":true},$(meet "$(room)")}"
}

probe pair-cached pair '§6.3' '"cached_tokens":[1-9].* \|\| .*"cached_tokens":[1-9]' \
	'D reports the cached tokens of P, or its own prefix if that is longer'
p_pair_cached() {
	local ids
	ids=$(seq -s, 2000 2300)
	pair /generate "{\"input_ids\":[$ids],$one,$(meet "$(room)")}" >/dev/null
	pair /generate "{\"input_ids\":[$ids],$one,$(meet "$(room)")}"
}

probe pair-session-id pair '§3.2 [inferred]' '^200 .* \|\| 200 ' \
	'a top-level session_id is compatible with bootstrap members'
p_pair_session_id() { pair /generate "{\"text\":\"Hi\",\"session_id\":\"probe\",$one,$(meet "$(room)")}"; }

probe pair-n2 pair '§2.1' ' \|\| (000|4|5)' \
	'n > 1 under PD is broken: expect an error or a time-out, never two answers'
p_pair_n2() { pair /v1/chat/completions "{$(m),$hello,\"max_tokens\":2,\"n\":2,$(meet "$(room)")}"; }

probe room-zero pair '§2.1 [inferred]' ' \|\| (000|500 .*WaitingForInput)' \
	'room 0 reads as "metadata not written": D waits until its time-out (keep --timeout above it, or see 000)'
p_room_zero() { pair /generate "{\"text\":\"Hi\",$one,$(meet 0)}"; }

probe prefill-abort-unheard pair '§2.5 [inferred]' '^(000|500 .*(WaitingForInput|Decode transfer failed))' \
	'a P leg that was cancelled is not reported to the D that comes later: D waits for its time-out'
p_prefill_abort_unheard() {
	local body
	body="{\"text\":\"Hi\",$one,$(meet "$(room)")}"
	curl -sS -m 0.5 -o /dev/null -H "Authorization: Bearer $key" -H 'Content-Type: application/json' \
		--data-binary "$body" "$prefill/generate" 2>/dev/null || true
	sleep 5 # SGLang notices a hang-up within about 4 s
	call POST "$decode/generate" "$body"
}

# call_stdin URL BODY: for bodies that do not fit on a command line.
call_stdin() {
	local out
	out=$(curl -sS -m "$timeout" -w $'\n%{http_code}' -H "Authorization: Bearer $key" \
		-H 'Content-Type: application/json' --data-binary @- "$1" <<<"$2" 2>&1) || { echo "000 $out" | tr '\n' ' '; return; }
	printf '%s %s' "${out##*$'\n'}" "${out%$'\n'*}" | tr '\n' ' '
}

probe decode-no-prefill decode '§2.5' '^(500 .*Decode handshake failed.*KVTransferError|000)' \
	'an unreachable bootstrap server: 15 attempts, one a second, then 500'
p_decode_no_prefill() {
	call POST "$decode/generate" "{\"text\":\"Hi\",$one,\"bootstrap_host\":\"127.0.0.1\",\"bootstrap_port\":9,\"bootstrap_room\":$(room)}"
}

probe fake-host decode '§2.6' '^200 .*"meta_info"' 'bootstrap host 2.2.2.2 is accepted at once'
p_fake_host() {
	call POST "$decode/generate" "{\"input_ids\":[10,11,12,13],$one,\"bootstrap_host\":\"2.2.2.2\",\"bootstrap_room\":0}"
}

probe responses-bootstrap pair '§6.4 [unsure]' ' \|\| (200|400 .*bootstrap room|404)' \
	'whether /v1/responses carries bootstrap members: 200 = yes, 400 = dropped'
p_responses_bootstrap() { pair /v1/responses "{$(m),\"input\":\"Hi\",\"max_output_tokens\":2,$(meet "$(room)")}"; }

probe messages-overrides pair '§6.6 [inferred]' ' \|\| (200|400|404)' \
	'whether /v1/messages heeds x-override-bootstrap-* (SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1)'
p_messages_overrides() {
	overridden /v1/messages "{$(m),\"max_tokens\":2,\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}"
}

# overridden PATH BODY: a pair whose bootstrap members travel in headers.
overridden() {
	local p d
	p=$(mktemp)
	local h=("x-override-bootstrap-host: ${bootstrap%:*}" "x-override-bootstrap-port: ${bootstrap##*:}"
		"x-override-bootstrap-room: $(room)")
	call POST "$prefill$1" "$2" "${h[@]}" >"$p" &
	d=$(call POST "$decode$1" "$2" "${h[@]}")
	wait $!
	printf '%s || %s' "$(cat "$p")" "$d"
	rm -f "$p"
}

probe chat-overrides pair '§6.6' ' \|\| (200 .*"chat.completion"|400 .*bootstrap room)' \
	'chat heeds x-override-bootstrap-* when SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1; 400 = it is off'
p_chat_overrides() { overridden /v1/chat/completions "{$(m),$hello,\"max_tokens\":2}"; }

probe role-switch decode '§10 [unsure]' '^(200 .*already|400|404|405)' \
	'/pd_role_switch to the same role; 404 = this release has none'
p_role_switch() { call POST "$decode/pd_role_switch" '{"new_role":"decode"}'; }

probe loads any '§4.3, §9 [unsure: first version]' '^200 .*"loads":\[\{.*"num_used_tokens"' '/v1/loads exists'
p_loads() { call GET "$any/v1/loads"; }

probe loads-bad-include any '§4.3' '^400 ' 'an unknown section is refused'
p_loads_bad_include() { call GET "$any/v1/loads?include=nonsense"; }

probe server-info any '§4.2, §9 [unsure: first version]' '^200 .*"kv_events":' '/server_info describes KV events (null when off)'
p_server_info() { call GET "$any/server_info"; }

probe used-excludes-cache unified '§4.3 [inferred]' '"num_used_tokens":0,' \
	'num_used_tokens of an idle engine is 0: what is merely cached does not count'
p_used_excludes_cache() {
	call POST "$unified/generate" "{\"input_ids\":[$(seq -s, 3000 3300)],$one}" >/dev/null
	sleep 2
	call GET "$unified/v1/loads?include=core"
}

probe generate-shape unified '§2.4' '^200 \{"text":.*"output_ids":\[.*"meta_info":\{"id":"probe-2","finish_reason":\{"type":"length","length":1\},"prompt_tokens"' \
	'the members of a /generate answer and their order'
p_generate_shape() { call POST "$unified/generate" "{\"rid\":\"probe-2\",\"text\":\"Hi\",\"sampling_params\":{\"max_new_tokens\":1,\"ignore_eos\":true}}"; }

probe chat-stream unified '§6.3' '"role":"assistant","content":"".*"choices":\[\],"usage":\{"prompt_tokens".*\[DONE\]' \
	'role chunk, deltas, finish chunk, usage chunk, [DONE]'
p_chat_stream() {
	call POST "$unified/v1/chat/completions" "{$(m),$hello,\"max_tokens\":3,\"stream\":true,\"stream_options\":{\"include_usage\":true}}"
}

probe chat-metadata unified 'emulator [inferred]' '"metadata":\{"weight_version":' 'a whole chat answer carries metadata'
p_chat_metadata() { call POST "$unified/v1/chat/completions" "{$(m),$hello,\"max_tokens\":1}"; }

probe completions-stream unified 'emulator [inferred]' '"object":"text_completion".*"text":.*"matched_stop":.*\[DONE\]' \
	'the members of a completions chunk'
p_completions_stream() { call POST "$unified/v1/completions" "{$(m),\"prompt\":\"Hi\",\"max_tokens\":2,\"stream\":true}"; }

probe completions-default unified 'emulator [inferred]' '"completion_tokens":([1-9]|1[0-6]),' \
	'/v1/completions without max_tokens gives at most 16'
p_completions_default() { call POST "$unified/v1/completions" "{$(m),\"prompt\":\"Count: 1 2 3\"}"; }

probe any-model unified 'emulator [inferred]' '^200 .*"model":"no-such-model"' 'the model name is echoed, not checked'
p_any_model() { call POST "$unified/v1/chat/completions" "{\"model\":\"no-such-model\",$hello,\"max_tokens\":1}"; }

probe too-long unified 'emulator [inferred]' "^400 .*(longer than the model's context length|exceeds the maximum number of tokens|maximum context length)" \
	'the message for a prompt above the context length'
p_too_long() { call_stdin "$unified/generate" "{\"input_ids\":[$(seq -s, 1 9 5000000)],$one}"; }

probe batch-rids unified 'emulator [inferred]' '^200 \[.*"id":"probe-3.*"id":"probe-3' 'a scalar rid over a batch gets suffixes'
p_batch_rids() { call POST "$unified/generate" "{\"rid\":\"probe-3\",\"text\":[\"a\",\"b\"],$one}"; }

probe abort-prefix unified '§4.5' '^200 ' '/abort_request answers 200 for an unknown rid'
p_abort_prefix() { call POST "$unified/abort_request" '{"rid":"nobody-","abort_all":false}'; }

probe flush any '§4.5' '^(200|400) ' '/flush_cache answers in text'
p_flush() { call POST "$any/flush_cache"; }

probe detokenize-special unified 'emulator [inferred]' '^200 .*"text":' '/detokenize skips special tokens by default'
p_detokenize_special() { call POST "$unified/detokenize" "{$(m),\"tokens\":[1,2,3]}"; }

probe api-key any '§6.5, emulator [inferred]' '^(401 .*Unauthorized|200)' \
	'without the key: 401 and {"error":"Unauthorized"} (200 when no key is set)'
p_api_key() {
	local key=''
	call GET "$any/v1/models"
}

probe duplicate-room pair! '§2.1' '.' \
	'two live requests in one room kill both schedulers [issue 40125]: see whether the engines survive'
p_duplicate_room() {
	local r body
	r=$(room)
	body="{\"text\":\"Hi\",\"sampling_params\":{\"max_new_tokens\":2000,\"ignore_eos\":true},$(meet "$r")}"
	pair /generate "$body" >/dev/null &
	sleep 0.2
	pair /generate "$body"
	wait $! || true
	printf ' || then %s' "$(call GET "$decode/health")"
}

probe room-without-host decode! '§2.2 [inferred]' '.' 'a room without a host kills the decode scheduler'
p_room_without_host() {
	call POST "$decode/generate" "{\"text\":\"Hi\",$one,\"bootstrap_room\":$(room)}"
	printf ' || then %s' "$(call GET "$decode/health")"
}

probe session-on-decode decode! '§3.1 [inferred]' '.' 'session_params on a decode worker kills its scheduler'
p_session_on_decode() {
	call POST "$decode/open_session" '{"capacity_of_str_len":1000,"session_id":"probe"}' >/dev/null
	call POST "$decode/generate" "{\"text\":\"Hi\",$one,\"session_params\":{\"id\":\"probe\"},$(meet "$(room)")}"
	printf ' || then %s' "$(call GET "$decode/health")"
}

# ---- run ----------------------------------------------------------------------

if [ -n "$list" ]; then
	for n in "${names[@]}"; do
		printf '%-26s %-9s %-34s %s\n' "$n" "${needs[$n]}" "${section[$n]}" "${why[$n]}"
	done
	printf '\nNot to be asked by HTTP: §2.6 (b), a null D beside a P that share a HiCache store; §9, the CUDA of an image.\n'
	exit
fi

any=${unified:-${decode:-$prefill}}
if [ -z "$any" ]; then
	usage >&2
	exit 2
fi
command -v curl >/dev/null || { echo "real-sglang: curl is not here; install it" >&2; exit 2; }
if [ -z "$model" ]; then
	model=$(call GET "$any/v1/models" | sed -n 's/.*"id":"\([^"]*\)".*/\1/p')
fi

# can NEEDS: whether the engines given are enough.
can() {
	case ${1%!} in
	any) true ;;
	unified) [ -n "$unified" ] ;;
	decode) [ -n "$decode" ] ;;
	prefill) [ -n "$prefill" ] && [ -n "$bootstrap" ] ;;
	pair) [ -n "$prefill" ] && [ -n "$decode" ] && [ -n "$bootstrap" ] ;;
	esac
}

wanted() {
	[ ${#only[@]} -eq 0 ] && return
	local o
	for o in "${only[@]}"; do [ "$o" = "$1" ] && return; done
	return 1
}

same=0 differ=0 skipped=0
for n in "${names[@]}"; do
	wanted "$n" || continue
	if ! can "${needs[$n]}" || { [[ ${needs[$n]} == *! ]] && [ -z "$destructive" ]; }; then
		skipped=$((skipped + 1))
		continue
	fi
	seen=$("p_${n//-/_}")
	if grep -Eq -- "${want[$n]}" <<<"$seen"; then
		same=$((same + 1))
		printf 'same    %s\n' "$n"
		[ -z "$verbose" ] || printf '        %s\n' "${seen:0:2000}"
	else
		differ=$((differ + 1))
		printf 'DIFFERS %s (%s): %s\n        want %s\n        seen %s\n' \
			"$n" "${section[$n]}" "${why[$n]}" "${want[$n]}" "${seen:0:2000}"
	fi
done
printf '%d as the contract says, %d differ, %d skipped (engines not given, or --destructive not set)\n' "$same" "$differ" "$skipped"
[ "$differ" -eq 0 ]
