"""The course: labs on offloading, graded by laws. README.md says how to begin, INSTRUCTOR.md how to grade.

    grade           `python -m course.grade LAB --adapters PATH`: the command
    check           `make course`: every grader on the solutions of its lab
    leaderboard     `python -m course.leaderboard`: the fastest plans of lab 4
    make_pictures   `python -m course.make_pictures`: the pictures of the labs' texts
    commands        what these commands share: what their user can do wrong is a line
    lab             finds a lab, its laws and a student's functions
    runner          judges a student's functions, in a process of its own
    grading         starts that process, limits its time, collects what it found
    report          what was found as text, results.json and a class's CSV
    law             what laws are made of: points, counterexamples, the smallest of them
    small_plans     operations and plans of labs 1 and 2, every order in which they can run, and their picture

A lab is a folder of `labs`: text, signatures, laws, solutions.
"""
