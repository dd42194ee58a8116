(* Every execution of a plan that zfunc/core/verifier.py accepts ends as the serial one does.

   docs/proof.md reads this file statement by statement. `make proof` checks it, with Coq 8.16 or newer. *)

From Coq Require Import List Arith Lia Bool Permutation Sorted.
Import ListNotations.

Section Proof.

Variable value : Type.

(* ---- 1. Operations and graphs ---- *)

Definition region := nat.
Definition cell := (region * nat)%type. (* an element of a region, by its offset *)
Definition memory := cell -> value.

Inductive step := Read (c : cell) | Write (c : cell) (v : value) | Pause.

(* The code of an operation gives its step number k, from all the values that it has read until then. *)
Record operation := {
  reads : list region;
  writes : list region;
  code : nat -> list value -> step;
  last : nat (* the number of its last step *)
}.

Definition graph := list operation. (* in serial order; an operation is known by its position *)

(* It touches only what it declares. It may look at what it writes, too. *)
Definition declared (o : operation) := forall k seen,
  match code o k seen with
  | Read c => In (fst c) (reads o) \/ In (fst c) (writes o)
  | Write c _ => In (fst c) (writes o)
  | Pause => True
  end.

Definition accesses (g : graph) i r :=
  exists o, nth_error g i = Some o /\ (In r (reads o) \/ In r (writes o)).
Definition writes_to (g : graph) i r := exists o, nth_error g i = Some o /\ In r (writes o).

Definition conflict_over g a b r := accesses g a r /\ accesses g b r /\ (writes_to g a r \/ writes_to g b r).
Definition conflict g a b := a < b /\ exists r, conflict_over g a b r.

(* Graph.conflicts: those without a write of the region between the two. *)
Definition direct_conflict g a b :=
  a < b /\ exists r, conflict_over g a b r /\ forall c, a < c < b -> ~ writes_to g c r.

(* ---- 2. Plans ---- *)

Record plan := { lanes : list (list nat); waits : list (list nat) }.

Fixpoint until (b : nat) (lane : list nat) : list nat :=
  match lane with [] => [] | a :: rest => if a =? b then [] else a :: until b rest end.

Definition on (b : nat) (lane : list nat) := existsb (Nat.eqb b) lane.

(* What has to finish before b starts: all before it on its lane, and its waits. *)
Definition needs (p : plan) (b : nat) : list nat :=
  flat_map (fun lane => if on b lane then until b lane else []) (lanes p) ++ nth b (waits p) [].

Inductive happens_before (p : plan) : nat -> nat -> Prop :=
| direct a b : In a (needs p b) -> happens_before p a b
| chain a b c : happens_before p a b -> happens_before p b c -> happens_before p a c.

(* An order that puts each operation after all that it needs. *)
Definition topological_order (p : plan) (order : list nat) :=
  forall early b late, order = early ++ b :: late -> incl (needs p b) early.

Record accepted (g : graph) (p : plan) : Prop := {
  once : Permutation (concat (lanes p)) (seq 0 (length g));
  no_deadlock : exists order, Permutation order (seq 0 (length g)) /\ topological_order p order;
  no_race : forall a b, direct_conflict g a b -> happens_before p a b
}.

(* ---- 3. Executions ---- *)

Record state := {
  mem : memory;
  seen : nat -> list value; (* of each operation, what it has read *)
  did : nat -> nat (* of each operation, how many steps *)
}.

Definition start (m : memory) : state := {| mem := m; seen := fun _ => []; did := fun _ => 0 |}.

Definition set {A} (f : nat -> A) (i : nat) (x : A) := fun j => if j =? i then x else f j.
Definition cell_eqb (c d : cell) := (fst c =? fst d) && (snd c =? snd d).
Definition store (m : memory) (c : cell) (v : value) : memory := fun d => if cell_eqb d c then v else m d.

Definition last_of (g : graph) i := match nth_error g i with Some o => last o | None => 0 end.
Definition finished g s i := did s i = S (last_of g i).

(* Operation i takes its next step. *)
Definition advance (g : graph) (s : state) (i : nat) : state :=
  match nth_error g i with
  | None => s
  | Some o =>
      let now := set (did s) i (S (did s i)) in
      match code o (did s i) (seen s i) with
      | Read c => {| mem := mem s; seen := set (seen s) i (seen s i ++ [mem s c]); did := now |}
      | Write c v => {| mem := store (mem s) c v; seen := seen s; did := now |}
      | Pause => {| mem := mem s; seen := seen s; did := now |}
      end
  end.

Definition run g (s : state) (steps : list nat) : state := fold_left (advance g) steps s.

(* The executor lets i take a step: it is on a lane, not finished, and all that it needs is, before its first. *)
Definition may_step g p s i :=
  i < length g /\ In i (concat (lanes p)) /\ did s i <= last_of g i /\
  (did s i = 0 -> forall a, In a (needs p i) -> finished g s a).

(* An execution, finished or not: whose step is next, again and again. *)
Fixpoint execution g p (s : state) (steps : list nat) : Prop :=
  match steps with [] => True | i :: rest => may_step g p s i /\ execution g p (advance g s i) rest end.

Definition complete g s := forall i, i < length g -> finished g s i.

(* The serial one: all steps of the first operation, then all of the second. *)
Definition serial (g : graph) : list nat := flat_map (fun i => repeat i (S (last_of g i))) (seq 0 (length g)).

Definition same (s t : state) :=
  (forall c, mem s c = mem t c) /\ (forall i, seen s i = seen t i) /\ (forall i, did s i = did t i).

(* ---- 4. All conflicts follow from the direct ones ---- *)

Lemma accesses_writes g i r : writes_to g i r -> accesses g i r.
Proof. intros (o & E & H). exists o. tauto. Qed.

Lemma writes_to_dec g i r : writes_to g i r \/ ~ writes_to g i r.
Proof.
  unfold writes_to. destruct (nth_error g i) as [o|] eqn:E.
  - destruct (in_dec Nat.eq_dec r (writes o)) as [H|H].
    + left. eauto.
    + right. intros (o' & E' & H'). injection E' as <-. contradiction.
  - right. intros (o' & E' & _). congruence.
Qed.

Lemma write_between g r a b :
  (exists c, a < c < b /\ writes_to g c r) \/ (forall c, a < c < b -> ~ writes_to g c r).
Proof.
  induction b as [|b IH].
  - right. intros. lia.
  - destruct IH as [(c & Hc & W)|IH].
    + left. exists c. split; [lia|assumption].
    + destruct (lt_dec a b) as [L|L].
      * destruct (writes_to_dec g b r) as [W|W].
        -- left. exists b. split; [lia|assumption].
        -- right. intros c Hc. destruct (Nat.eq_dec c b) as [->|]; [assumption|]. apply IH. lia.
      * right. intros. lia.
Qed.

Lemma all_conflicts g p :
  (forall a b, direct_conflict g a b -> happens_before p a b) ->
  forall a b, conflict g a b -> happens_before p a b.
Proof.
  intros D.
  assert (forall n a b, b - a <= n -> conflict g a b -> happens_before p a b) as H.
  { induction n as [|n IH]; intros a b Hn (L & r & Aa & Ab & W); [lia|].
    destruct (write_between g r a b) as [(c & Hc & Wc)|No].
    - apply chain with c; apply IH; try lia; (split; [lia|]); exists r; unfold conflict_over;
        auto using accesses_writes.
    - apply D. split; [lia|]. exists r. unfold conflict_over. auto. }
  intros a b C. apply (H (b - a)); auto.
Qed.

(* ---- 5. Steps of operations that do not conflict can change places ---- *)

Lemma same_refl s : same s s.
Proof. unfold same. auto. Qed.

Lemma same_trans s t u : same s t -> same t u -> same s u.
Proof. intros (A & B & C) (D & E & F). repeat split; intros; etransitivity; eauto. Qed.

Lemma advance_same g s t i : same s t -> same (advance g s i) (advance g t i).
Proof.
  intros (M & S & D). unfold advance. destruct (nth_error g i) as [o|]; [|repeat split; assumption].
  rewrite (S i), (D i).
  destruct (code o (did t i) (seen t i)) as [c|c v|]; unfold same, set, store; simpl;
    repeat split; intros; try rewrite M; try rewrite S; try rewrite D; auto.
Qed.

Lemma run_same g l : forall s t, same s t -> same (run g s l) (run g t l).
Proof. induction l as [|i l IH]; simpl; intros s t H; [exact H|]. apply IH, advance_same, H. Qed.

Lemma store_other m c v d : fst d <> fst c -> store m c v d = m d.
Proof.
  unfold store, cell_eqb. intros H. destruct (Nat.eqb_spec (fst d) (fst c)); [contradiction|reflexivity].
Qed.

Definition unrelated g i j := i <> j /\ ~ (exists r, conflict_over g i j r).

Lemma set_other {A} (f : nat -> A) i x j : j <> i -> set f i x j = f j.
Proof. unfold set. intros H. destruct (Nat.eqb_spec j i); [contradiction|reflexivity]. Qed.

Lemma set_swap {A} (f : nat -> A) i x j y k : i <> j -> set (set f i x) j y k = set (set f j y) i x k.
Proof. unfold set. intros H. destruct (Nat.eqb_spec k i), (Nat.eqb_spec k j); congruence. Qed.

Lemma store_swap m c v d w e :
  fst c <> fst d -> store (store m c v) d w e = store (store m d w) c v e.
Proof.
  unfold store, cell_eqb. intros H.
  destruct (Nat.eqb_spec (fst e) (fst c)), (Nat.eqb_spec (fst e) (fst d)); simpl; auto. congruence.
Qed.

Lemma swap g s i j :
  Forall declared g -> unrelated g i j -> same (advance g (advance g s i) j) (advance g (advance g s j) i).
Proof.
  intros Hon (Nij & NC).
  assert (Nji : j <> i) by congruence.
  unfold advance at 2 4.
  destruct (nth_error g i) as [oi|] eqn:Ei; [|unfold advance; rewrite Ei; apply same_refl].
  destruct (nth_error g j) as [oj|] eqn:Ej; [|unfold advance; rewrite Ei, Ej; apply same_refl].
  pose proof (proj1 (Forall_forall _ _) Hon oi (nth_error_In _ _ Ei) (did s i) (seen s i)) as Di.
  pose proof (proj1 (Forall_forall _ _) Hon oj (nth_error_In _ _ Ej) (did s j) (seen s j)) as Dj.
  assert (Apart : forall r, In r (writes oi) \/ In r (writes oj) ->
                  ~ (In r (reads oi) \/ In r (writes oi)) \/ ~ (In r (reads oj) \/ In r (writes oj))).
  { intros r W.
    destruct (in_dec Nat.eq_dec r (reads oi ++ writes oi)) as [A|A];
      [|left; intros B; apply A, in_or_app, B].
    destruct (in_dec Nat.eq_dec r (reads oj ++ writes oj)) as [B|B];
      [|right; intros C; apply B, in_or_app, C].
    exfalso. apply NC. exists r. apply in_app_or in A, B. unfold conflict_over, accesses, writes_to.
    repeat split; eauto. destruct W; eauto. }
  destruct (code oi (did s i) (seen s i)) as [ci|ci vi|] eqn:Ci;
    destruct (code oj (did s j) (seen s j)) as [cj|cj vj|] eqn:Cj;
    unfold advance; rewrite Ei, Ej; simpl;
    repeat (rewrite (set_other _ i _ j Nji) || rewrite (set_other _ j _ i Nij));
    rewrite ?Ci, ?Cj; simpl;
    repeat split; simpl; intros;
    try (apply set_swap; congruence); try reflexivity.
  all: try (rewrite store_other; [apply set_swap; congruence|]).
  all: try (rewrite store_other; [reflexivity|]).
  all: try apply store_swap.
  all: intros E; pose proof (Apart (fst ci)); pose proof (Apart (fst cj)); rewrite E in *; tauto.
Qed.

Lemma move_to_front g i l : forall s,
  Forall declared g -> Forall (fun j => unrelated g i j) l -> same (run g s (l ++ [i])) (run g (advance g s i) l).
Proof.
  induction l as [|j l IH]; intros s Hon U; simpl; [apply same_refl|].
  apply Forall_cons_iff in U as [Uj U].
  eapply same_trans; [apply IH; assumption|].
  apply run_same, swap; [assumption|]. destruct Uj as (N & C). split; [congruence|].
  intros (r & A & B & W). apply C. exists r. unfold conflict_over. tauto.
Qed.

(* ---- 6. Two runs with the same steps and each conflict in its serial order end the same ---- *)

Fixpoint in_order g (l : list nat) : Prop :=
  match l with [] => True | b :: rest => (forall a, conflict g a b -> ~ In a rest) /\ in_order g rest end.

Lemma in_order_without g i l2 l1 : in_order g (l1 ++ i :: l2) -> in_order g (l1 ++ l2).
Proof.
  induction l1 as [|b l1 IH]; simpl; intros (H & R); [exact R|]. split; [|apply IH, R].
  intros a C J. apply (H a C). apply in_app_or in J. apply in_or_app. simpl. tauto.
Qed.

Lemma in_order_before g i l2 l1 :
  in_order g (l1 ++ i :: l2) -> forall j, In j l1 -> ~ conflict g i j.
Proof.
  induction l1 as [|b l1 IH]; simpl; intros O j J; [contradiction|]. destruct O as (H & R).
  destruct J as [->|J]; [|apply IH; assumption].
  intros C. apply (H i C). apply in_or_app. simpl. tauto.
Qed.

Notation count := (count_occ Nat.eq_dec).

Lemma first_occurrence (i : nat) l : In i l -> exists l1 l2, l = l1 ++ i :: l2 /\ ~ In i l1.
Proof.
  induction l as [|j l IH]; simpl; [tauto|]. intros H. destruct (Nat.eq_dec j i) as [->|N].
  - exists [], l. auto.
  - destruct H as [H|H]; [congruence|]. destruct (IH H) as (l1 & l2 & -> & N').
    exists (j :: l1), l2. split; [reflexivity|]. simpl. tauto.
Qed.

Lemma same_end g : Forall declared g -> forall l' l s,
  (forall i, count l i = count l' i) -> in_order g l -> in_order g l' -> same (run g s l) (run g s l').
Proof.
  intros Hon. induction l' as [|i l' IH]; intros l s C O O'.
  - destruct l as [|j l]; [apply same_refl|]. specialize (C j). simpl in C.
    destruct (Nat.eq_dec j j); [discriminate|contradiction].
  - assert (In i l) as I.
    { apply (count_occ_In Nat.eq_dec). rewrite C. simpl. destruct (Nat.eq_dec i i); [lia|contradiction]. }
    apply first_occurrence in I as (l1 & l2 & -> & N).
    assert (Forall (fun j => unrelated g i j) l1) as U.
    { apply Forall_forall. intros j J. assert (i <> j) as D by (intros <-; contradiction). split; [exact D|].
      intros (r & A & B & W). destruct (Nat.lt_total i j) as [L|[L|L]]; [|contradiction|].
      - apply (in_order_before _ _ _ _ O j J). split; [assumption|]. exists r. unfold conflict_over. tauto.
      - destruct O' as (O' & _). apply (O' j).
        + split; [assumption|]. exists r. unfold conflict_over. tauto.
        + assert (In j (i :: l')) as [K|K]; [|contradiction|exact K].
          apply (count_occ_In Nat.eq_dec). rewrite <- C. apply count_occ_In, in_or_app. tauto. }
    replace (l1 ++ i :: l2) with ((l1 ++ [i]) ++ l2) by (rewrite <- app_assoc; reflexivity).
    unfold run. rewrite fold_left_app. simpl.
    eapply same_trans; [apply run_same, move_to_front; assumption|].
    fold (run g (run g (advance g s i) l1) l2) (run g (advance g s i) l').
    replace (run g (run g (advance g s i) l1) l2) with (run g (advance g s i) (l1 ++ l2))
      by (unfold run; rewrite fold_left_app; reflexivity).
    apply IH; [|eapply in_order_without; eassumption|apply O'].
    intros j. specialize (C j). rewrite count_occ_app in *. simpl in C. destruct (Nat.eq_dec i j); lia.
Qed.

(* ---- 7. An execution has each conflict in its serial order ---- *)

Lemma did_advance g s i : i < length g -> did (advance g s i) = set (did s) i (S (did s i)).
Proof.
  intros L. apply nth_error_Some in L. unfold advance. destruct (nth_error g i) as [o|]; [|congruence].
  destruct (code o (did s i) (seen s i)); reflexivity.
Qed.

(* What has started has all that it needs behind it. *)
Definition sound g p s := forall b a, did s b > 0 -> In a (needs p b) -> finished g s a.

Lemma finished_stays g p s i a : may_step g p s i -> finished g s a -> finished g (advance g s i) a.
Proof.
  intros (L & _ & D & _) F. unfold finished in *. rewrite did_advance by assumption. rewrite set_other; [exact F|].
  intros ->. lia.
Qed.

Lemma sound_advance g p s i : sound g p s -> may_step g p s i -> sound g p (advance g s i).
Proof.
  intros S M b a D N. apply (finished_stays g p); [exact M|].
  destruct (Nat.eq_dec b i) as [->|B].
  - destruct (did s i) eqn:E; [apply M; assumption|]. apply (S i); [lia|assumption].
  - apply (S b); [|assumption]. rewrite did_advance, set_other in D; [exact D|assumption|apply M].
Qed.

Lemma sound_chain g p s a b : sound g p s -> happens_before p a b -> did s b > 0 -> finished g s a.
Proof.
  intros S H. induction H as [a b N|a b c _ IH1 _ IH2]; intros D; [apply (S b); assumption|].
  apply IH1. specialize (IH2 D). unfold finished in IH2. lia.
Qed.

Lemma finished_no_more g p l : forall s a, execution g p s l -> finished g s a -> ~ In a l.
Proof.
  induction l as [|i l IH]; simpl; intros s a E F; [tauto|]. destruct E as (M & E). intros [->|J].
  - destruct M as (_ & _ & D & _). unfold finished in F. lia.
  - eapply IH; [exact E| |exact J]. eapply finished_stays; eassumption.
Qed.

Lemma execution_in_order g p : (forall a b, conflict g a b -> happens_before p a b) ->
  forall l s, sound g p s -> execution g p s l -> in_order g l.
Proof.
  intros R. induction l as [|b l IH]; simpl; intros s S E; [exact I|]. destruct E as (M & E).
  pose proof (sound_advance _ _ _ _ S M) as S'. split; [|apply (IH _ S' E)].
  intros a C. eapply finished_no_more; [exact E|]. apply (sound_chain g p _ a b S' (R a b C)).
  rewrite did_advance by apply M. unfold set. rewrite Nat.eqb_refl. lia.
Qed.

Lemma did_run g p l : forall s i, execution g p s l -> did (run g s l) i = did s i + count l i.
Proof.
  induction l as [|j l IH]; simpl; intros s i E; [lia|]. destruct E as (M & E).
  unfold run in *. rewrite (IH _ i E), did_advance by apply M. unfold set.
  destruct (Nat.eqb_spec i j), (Nat.eq_dec j i); subst; try congruence; lia.
Qed.

Lemma execution_in_graph g p l : forall s i, execution g p s l -> In i l -> i < length g.
Proof.
  induction l as [|j l IH]; simpl; intros s i E I; [tauto|]. destruct E as (M & E).
  destruct I as [->|I]; [apply M|eapply IH; eassumption].
Qed.

(* ---- 8. The serial one ---- *)

Lemma count_repeat n i j : count (repeat i n) j = if i =? j then n else 0.
Proof.
  induction n as [|n IH]; simpl; [destruct (i =? j); reflexivity|].
  destruct (Nat.eq_dec i j), (Nat.eqb_spec i j); subst; try congruence.
Qed.

Lemma count_from (f : nat -> nat) len i : forall first,
  count (flat_map (fun i => repeat i (f i)) (seq first len)) i =
  if (first <=? i) && (i <? first + len) then f i else 0.
Proof.
  induction len as [|len IH]; intros first; simpl.
  - destruct (Nat.leb_spec first i), (Nat.ltb_spec i (first + 0)); simpl; lia.
  - rewrite count_occ_app, IH, count_repeat.
    destruct (Nat.eqb_spec first i), (Nat.leb_spec (S first) i), (Nat.leb_spec first i),
      (Nat.ltb_spec i (S first + len)), (Nat.ltb_spec i (first + S len)); subst; simpl; try lia.
Qed.

Lemma count_serial g i : count (serial g) i = if i <? length g then S (last_of g i) else 0.
Proof. unfold serial. rewrite (count_from (fun i => S (last_of g i))). reflexivity. Qed.

Lemma serial_in_order g : in_order g (serial g).
Proof.
  unfold serial. generalize 0 as first, (length g) as len. intros first len. revert first.
  induction len as [|len IH]; intros first; [exact I|]. cbn [seq flat_map].
  assert (forall a, In a (flat_map (fun i => repeat i (S (last_of g i))) (seq (S first) len)) -> first < a) as L.
  { intros a H. apply in_flat_map in H as (x & X & H). apply in_seq in X. apply repeat_spec in H. lia. }
  generalize (S (last_of g first)) as n. induction n as [|n IHn]; simpl; [apply IH|]. split; [|exact IHn].
  intros a (La & _) H. apply in_app_or in H as [H|H]; [apply repeat_spec in H; lia|apply L in H; lia].
Qed.

Lemma never_too_many g p l : forall s, (forall i, did s i <= S (last_of g i)) -> execution g p s l ->
  forall i, did (run g s l) i <= S (last_of g i).
Proof.
  induction l as [|j l IH]; simpl; intros s T E i; [apply T|]. destruct E as (M & E).
  apply IH; [|exact E]. intros k. rewrite did_advance by apply M. unfold set.
  destruct (Nat.eqb_spec k j) as [->|]; [|apply T]. destruct M as (_ & _ & D & _). lia.
Qed.

Lemma first_unfinished g s order :
  Forall (finished g s) order \/
  exists early b late, order = early ++ b :: late /\ Forall (finished g s) early /\ ~ finished g s b.
Proof.
  induction order as [|b order IH]; [left; constructor|].
  destruct (Nat.eq_dec (did s b) (S (last_of g b))) as [F|F].
  - destruct IH as [IH|(early & c & late & -> & A & B)]; [left; constructor; assumption|].
    right. exists (b :: early), c, late. repeat split; [constructor|]; assumption.
  - right. exists [], b, order. repeat split; [constructor|exact F].
Qed.

(* ---- 9. The theorems ---- *)

Lemma start_sound g p m : sound g p (start m).
Proof. intros b a D. simpl in D. lia. Qed.

(* Every execution that completes ends with the memory of the serial one, and every operation has read the same. *)
Theorem ends_as_serial g p m steps :
  Forall declared g -> accepted g p -> execution g p (start m) steps -> complete g (run g (start m) steps) ->
  same (run g (start m) steps) (run g (start m) (serial g)).
Proof.
  intros Hon A E C. apply same_end; [exact Hon| | |apply serial_in_order].
  - intros i. rewrite count_serial. destruct (Nat.ltb_spec i (length g)) as [L|L].
    + specialize (C i L). unfold finished in C. rewrite (did_run g p) in C by exact E. simpl in C. exact C.
    + apply count_occ_not_In. intros H. apply (execution_in_graph _ _ _ _ _ E) in H. lia.
  - apply (execution_in_order g p) with (s := start m); [|apply start_sound|exact E].
    apply all_conflicts, A.
Qed.

(* As long as an operation is not finished, one can take a step. *)
Theorem never_stuck g p m steps :
  accepted g p -> execution g p (start m) steps ->
  complete g (run g (start m) steps) \/ exists i, may_step g p (run g (start m) steps) i.
Proof.
  intros A E. pose proof (never_too_many g p steps (start m)) as Most. simpl in Most.
  specialize (Most ltac:(lia) E). revert Most. generalize (run g (start m) steps) as s. intros s Most.
  destruct (no_deadlock _ _ A) as (order & P & T).
  destruct (first_unfinished g s order) as [F|(early & b & late & -> & F & N)].
  - left. intros i L. rewrite Forall_forall in F. apply F.
    eapply Permutation_in; [symmetry; exact P|]. apply in_seq. lia.
  - right. exists b. unfold may_step.
    assert (In b (seq 0 (length g))) as K.
    { eapply Permutation_in; [exact P|]. apply in_or_app. simpl. tauto. }
    repeat split.
    + apply in_seq in K. lia.
    + eapply Permutation_in; [symmetry; apply (once _ _ A)|exact K].
    + unfold finished in N. specialize (Most b). lia.
    + intros _ a N'. rewrite Forall_forall in F. apply F. eapply T; [reflexivity|exact N'].
Qed.

(* No execution is longer than the serial one, so each comes to its end. *)
Theorem comes_to_an_end g p m steps : execution g p (start m) steps -> length steps <= length (serial g).
Proof.
  intros E. pose proof (never_too_many g p steps (start m) ltac:(simpl; lia) E) as Most.
  assert (forall l l' : list nat, (forall i, count l i <= count l' i) -> length l <= length l') as Shorter.
  { induction l as [|i l IH]; intros l' C; simpl; [lia|].
    assert (In i l') as K.
    { apply (count_occ_In Nat.eq_dec). specialize (C i). simpl in C. destruct (Nat.eq_dec i i); [lia|contradiction]. }
    apply in_split in K as (l1 & l2 & ->). rewrite app_length. simpl. rewrite Nat.add_succ_r, <- app_length.
    apply le_n_S, IH. intros j. specialize (C j). rewrite count_occ_app in *. simpl in C.
    destruct (Nat.eq_dec i j); lia. }
  apply Shorter. intros i. rewrite count_serial. specialize (Most i). rewrite (did_run g p) in Most by exact E.
  simpl in Most. destruct (Nat.ltb_spec i (length g)); [exact Most|].
  enough (count steps i = 0) by lia. apply count_occ_not_In. intros K.
  apply (execution_in_graph _ _ _ _ _ E) in K. lia.
Qed.

End Proof.

Print Assumptions ends_as_serial.
Print Assumptions never_stuck.
Print Assumptions comes_to_an_end.
