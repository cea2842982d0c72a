;; Helpers for policies in WebAssembly text: `forkpoint policy build` puts them where the policy has the line
;; `;; include forkpoint.wat`, which is the first of its module. What the values mean is the contract's to say:
;; wit/policy.wit.
;;
;; The policy exports "route": one argument, the address of the request (at +88 the session), and the address of the
;; contract's result, which the $fp_ functions for plans make. Text is an address and a length. The policy's own data
;; lie below 65000, where those of the helpers begin. The numbers are offsets in the canonical ABI of 32-bit memory.
;; Nothing is freed, as an instance serves one request.
(import "forkpoint:policy/engine@0.1.0" "decide" (func $engine_decide (param i32 i32 i32 i32)))
(import "forkpoint:policy/host@0.1.0" "config" (func $host_config (param i32 i32 i32)))
(memory (export "memory") 2)
(global $fp_free (mut i32) (i32.const 65536))

;; Zeroed memory, aligned to 8 bytes.
(func $fp_room (param $size i32) (result i32)
  (local $at i32) (local $missing i32)
  (local.set $at (i32.and (i32.add (global.get $fp_free) (i32.const 7)) (i32.const -8)))
  (global.set $fp_free (i32.add (local.get $at) (local.get $size)))
  (local.set $missing (i32.sub (global.get $fp_free) (i32.shl (memory.size) (i32.const 16))))
  (if (i32.gt_s (local.get $missing) (i32.const 0))
    (then (if (i32.lt_s (memory.grow (i32.shr_u (i32.add (local.get $missing) (i32.const 65535)) (i32.const 16))) (i32.const 0))
      (then unreachable))))
  (local.get $at))

;; What the host lowers its values with.
(func (export "cabi_realloc") (param $old i32) (param $old_size i32) (param $align i32) (param $size i32) (result i32)
  (local $at i32)
  (local.set $at (call $fp_room (local.get $size)))
  (memory.copy (local.get $at) (local.get $old)
    (select (local.get $old_size) (local.get $size) (i32.lt_u (local.get $old_size) (local.get $size))))
  (local.get $at))

(func $fp_store_text (param $at i32) (param $text i32) (param $length i32)
  (i32.store (local.get $at) (local.get $text))
  (i32.store offset=4 (local.get $at) (local.get $length)))

;; The text of the user's last turn, or nothing.
(func $fp_last_user (param $request i32) (result i32 i32)
  (local $turn i32) (local $left i32)
  (local.set $left (i32.load offset=20 (local.get $request)))
  (local.set $turn (i32.add (i32.load offset=16 (local.get $request)) (i32.shl (local.get $left) (i32.const 5))))
  (block $none (loop $turns
    (br_if $none (i32.eqz (local.get $left)))
    (local.set $left (i32.sub (local.get $left) (i32.const 1)))
    (local.set $turn (i32.sub (local.get $turn) (i32.const 32)))
    (br_if $turns (i32.ne (i32.load8_u (local.get $turn)) (i32.const 1)))
    (return (i32.load offset=4 (local.get $turn)) (i32.load offset=8 (local.get $turn)))))
  (i32.const 0) (i32.const 0))

;; The last turn that proposes calls: the address of its record and of what ends the turns; 0 for none.
(func $fp_calling_turn (param $request i32) (result i32 i32)
  (local $turn i32) (local $left i32) (local $end i32)
  (local.set $left (i32.load offset=20 (local.get $request)))
  (local.set $end (i32.add (i32.load offset=16 (local.get $request)) (i32.shl (local.get $left) (i32.const 5))))
  (local.set $turn (local.get $end))
  (block $none (loop $turns
    (br_if $none (i32.eqz (local.get $left)))
    (local.set $left (i32.sub (local.get $left) (i32.const 1)))
    (local.set $turn (i32.sub (local.get $turn) (i32.const 32)))
    (br_if $turns (i32.eqz (i32.load offset=16 (local.get $turn))))
    (return (local.get $turn) (local.get $end))))
  (i32.const 0) (i32.const 0))

;; Whether two texts are the same.
(func $fp_same (param $a i32) (param $a_length i32) (param $b i32) (param $b_length i32) (result i32)
  (if (i32.ne (local.get $a_length) (local.get $b_length)) (then (return (i32.const 0))))
  (call $fp_starts (local.get $a) (local.get $b) (local.get $b_length)))

;; Whether what lies at $a begins as $b does; there must be as much.
(func $fp_starts (param $a i32) (param $b i32) (param $length i32) (result i32)
  (loop $bytes
    (if (i32.eqz (local.get $length)) (then (return (i32.const 1))))
    (if (i32.ne (i32.load8_u (local.get $a)) (i32.load8_u (local.get $b))) (then (return (i32.const 0))))
    (local.set $a (i32.add (local.get $a) (i32.const 1)))
    (local.set $b (i32.add (local.get $b) (i32.const 1)))
    (local.set $length (i32.sub (local.get $length) (i32.const 1)))
    (br $bytes))
  unreachable)

;; Whether a text holds another.
(func $fp_holds (param $text i32) (param $length i32) (param $part i32) (param $part_length i32) (result i32)
  (loop $places
    (if (i32.lt_u (local.get $length) (local.get $part_length)) (then (return (i32.const 0))))
    (if (call $fp_starts (local.get $text) (local.get $part) (local.get $part_length)) (then (return (i32.const 1))))
    (local.set $text (i32.add (local.get $text) (i32.const 1)))
    (local.set $length (i32.sub (local.get $length) (i32.const 1)))
    (br $places))
  unreachable)

;; Room for so many questions.
(func $fp_questions (param $count i32) (result i32)
  (call $fp_room (i32.mul (local.get $count) (i32.const 48))))

;; Makes a question of the list a yes-or-no question.
(func $fp_boolean (param $questions i32) (param $index i32) (param $text i32) (param $length i32)
  (local $at i32)
  (local.set $at (i32.add (local.get $questions) (i32.mul (local.get $index) (i32.const 48))))
  (call $fp_store_text (local.get $at) (local.get $text) (local.get $length))
  (i32.store8 offset=8 (local.get $at) (i32.const 1)))

;; Makes it a choice of $count options, each of which is 20 bytes at $options: name, 1, what it means.
(func $fp_choice (param $questions i32) (param $index i32) (param $text i32) (param $length i32) (param $options i32) (param $count i32)
  (local $at i32)
  (local.set $at (i32.add (local.get $questions) (i32.mul (local.get $index) (i32.const 48))))
  (call $fp_store_text (local.get $at) (local.get $text) (local.get $length))
  (call $fp_store_text (i32.add (local.get $at) (i32.const 12)) (local.get $options) (local.get $count)))

;; Has a question of the list answered by a probe.
(func $fp_probed (param $questions i32) (param $index i32) (param $name i32) (param $length i32)
  (local $at i32)
  (local.set $at (i32.add (local.get $questions) (i32.mul (local.get $index) (i32.const 48))))
  (i32.store8 offset=36 (local.get $at) (i32.const 1))
  (call $fp_store_text (i32.add (local.get $at) (i32.const 40)) (local.get $name) (local.get $length)))

;; Answers questions about a session: the address of the answers, or 0 and the address of what the policy returns.
(func $fp_decide (param $session i32) (param $questions i32) (param $count i32) (result i32 i32)
  (local $out i32) (local $text i32) (local $kind i32)
  (local.set $out (call $fp_room (i32.const 16)))
  (call $engine_decide (local.get $session) (local.get $questions) (local.get $count) (local.get $out))
  (if (i32.eqz (i32.load8_u (local.get $out))) (then (return (i32.load offset=4 (local.get $out)) (i32.const 0))))
  ;; "kind: text"
  (local.set $text (call $fp_room (i32.add (i32.load offset=12 (local.get $out)) (i32.const 13))))
  (local.set $kind (i32.mul (i32.load8_u offset=4 (local.get $out)) (i32.const 16)))
  (memory.copy (local.get $text) (i32.add (i32.const 65000) (local.get $kind)) (i32.const 13))
  (local.set $kind (i32.load8_u offset=15 (i32.add (i32.const 65000) (local.get $kind))))
  (memory.copy (i32.add (local.get $text) (local.get $kind)) (i32.load offset=8 (local.get $out)) (i32.load offset=12 (local.get $out)))
  (i32.const 0)
  (call $fp_error (local.get $text) (i32.add (local.get $kind) (i32.load offset=12 (local.get $out)))))
;; Each kind in 15 bytes, and its length.
(data (i32.const 65000) "invalid:       \09full:          \06budget:        \08denied:        \08unavailable:   \0d")

(func $fp_answer (param $answers i32) (param $index i32) (result i32)
  (i32.add (local.get $answers) (i32.mul (local.get $index) (i32.const 48))))
;; The probability of yes.
(func $fp_yes (param $answers i32) (param $index i32) (result f64)
  (f64.load offset=8 (call $fp_answer (local.get $answers) (local.get $index))))
;; The likeliest option of a choice.
(func $fp_chosen (param $answers i32) (param $index i32) (result i32 i32)
  (i32.load offset=8 (call $fp_answer (local.get $answers) (local.get $index)))
  (i32.load offset=12 (call $fp_answer (local.get $answers) (local.get $index))))
;; The probability of an option or level.
(func $fp_probability (param $answers i32) (param $index i32) (param $option i32) (result f64)
  (f64.load (i32.add (i32.load offset=16 (call $fp_answer (local.get $answers) (local.get $index)))
    (i32.shl (local.get $option) (i32.const 3)))))
(func $fp_mass (param $answers i32) (param $index i32) (result f64)
  (f64.load offset=32 (call $fp_answer (local.get $answers) (local.get $index))))
(func $fp_from_probe (param $answers i32) (param $index i32) (result i32)
  (i32.load8_u offset=40 (call $fp_answer (local.get $answers) (local.get $index))))

;; The policy's error, which takes its fallback.
(func $fp_error (param $text i32) (param $length i32) (result i32)
  (local $out i32)
  (local.set $out (call $fp_room (i32.const 120)))
  (i32.store8 (local.get $out) (i32.const 1))
  (call $fp_store_text (i32.add (local.get $out) (i32.const 8)) (local.get $text) (local.get $length))
  (local.get $out))

(func $fp_plan (param $tag i32) (param $reason i32) (param $length i32) (result i32)
  (local $out i32)
  (local.set $out (call $fp_room (i32.const 120)))
  (i32.store8 offset=8 (local.get $out) (local.get $tag))
  (call $fp_store_text (i32.add (local.get $out) (i32.const 104)) (local.get $reason) (local.get $length))
  (local.get $out))
;; Replies from the session's own model, with what the client asked for.
(func $fp_generate (param $reason i32) (param $length i32) (result i32)
  (call $fp_plan (i32.const 0) (local.get $reason) (local.get $length)))
;; Answers with this text; no model runs.
(func $fp_reply (param $text i32) (param $length i32) (param $reason i32) (param $reason_length i32) (result i32)
  (local $out i32)
  (local.set $out (call $fp_plan (i32.const 2) (local.get $reason) (local.get $reason_length)))
  (call $fp_store_text (i32.add (local.get $out) (i32.const 16)) (local.get $text) (local.get $length))
  (local.get $out))
;; Refuses, with an HTTP status of 400 to 599, a code for programs and a sentence for people.
(func $fp_reject (param $status i32) (param $code i32) (param $code_length i32) (param $text i32) (param $length i32) (result i32)
  (local $out i32)
  (local.set $out (call $fp_plan (i32.const 3) (local.get $code) (local.get $code_length)))
  (i32.store16 offset=16 (local.get $out) (local.get $status))
  (call $fp_store_text (i32.add (local.get $out) (i32.const 20)) (local.get $code) (local.get $code_length))
  (call $fp_store_text (i32.add (local.get $out) (i32.const 28)) (local.get $text) (local.get $length))
  (local.get $out))
;; Has no opinion: the next policy of the chain is asked.
(func $fp_next (param $reason i32) (param $length i32) (result i32)
  (call $fp_plan (i32.const 4) (local.get $reason) (local.get $length)))

;; Adds a name and a value between 0 and 9 with two decimals to the journal.
(func $fp_label (param $out i32) (param $name i32) (param $length i32) (param $value f64)
  (local $list i32) (local $count i32) (local $digits i32) (local $hundredths i32)
  (local.set $count (i32.load offset=116 (local.get $out)))
  (local.set $list (call $fp_room (i32.shl (i32.add (local.get $count) (i32.const 1)) (i32.const 4))))
  (memory.copy (local.get $list) (i32.load offset=112 (local.get $out)) (i32.shl (local.get $count) (i32.const 4)))
  (call $fp_store_text (i32.add (local.get $out) (i32.const 112)) (local.get $list) (i32.add (local.get $count) (i32.const 1)))
  (local.set $hundredths (i32.trunc_sat_f64_s (f64.nearest (f64.mul (local.get $value) (f64.const 100)))))
  (local.set $digits (call $fp_room (i32.const 4)))
  (i32.store8 (local.get $digits) (i32.add (i32.const 48) (i32.div_u (local.get $hundredths) (i32.const 100))))
  (i32.store8 offset=1 (local.get $digits) (i32.const 46))
  (i32.store8 offset=2 (local.get $digits)
    (i32.add (i32.const 48) (i32.rem_u (i32.div_u (local.get $hundredths) (i32.const 10)) (i32.const 10))))
  (i32.store8 offset=3 (local.get $digits) (i32.add (i32.const 48) (i32.rem_u (local.get $hundredths) (i32.const 10))))
  (local.set $list (i32.add (local.get $list) (i32.shl (local.get $count) (i32.const 4))))
  (call $fp_store_text (local.get $list) (local.get $name) (local.get $length))
  (call $fp_store_text (i32.add (local.get $list) (i32.const 8)) (local.get $digits) (i32.const 4)))

;; A value of the policy's configuration: its address, or 0, and its length.
(func $fp_config (param $key i32) (param $length i32) (result i32 i32)
  (local $out i32)
  (local.set $out (call $fp_room (i32.const 12)))
  (call $host_config (local.get $key) (local.get $length) (local.get $out))
  (if (i32.eqz (i32.load8_u (local.get $out))) (then (return (i32.const 0) (i32.const 0))))
  (i32.load offset=4 (local.get $out)) (i32.load offset=8 (local.get $out)))
